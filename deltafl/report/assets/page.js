"use strict";

// Draws the numbers that the page carries as JSON. What a run says only ever becomes the text of
// an element, never markup.

const byId = (id) => document.getElementById(id);
let data = JSON.parse(byId("data").textContent);

const chosen = {
  task: "",
  spread: "",
  measure: "accuracy",
  steps: "",
  // What is unticked, not what is ticked: whatever a live run brings along is shown.
  off: { optimizer: new Set(), objective: new Set(), server: new Set(), setup: new Set() },
  open: new Set(),
};

// --- elements -------------------------------------------------------------------------------

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "color")
      element.style.setProperty("--c", value === "#000000" ? "currentColor" : value);
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
const make = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function swatch(look) {
  const line = draw("line", {
    class: "line",
    color: look.color,
    x1: 0,
    x2: 22,
    y1: 6,
    y2: 6,
    "stroke-width": look.width,
    "stroke-dasharray": look.dash,
  });
  return draw("svg", { width: 22, height: 12, "aria-hidden": "true" }, line);
}

// --- numbers --------------------------------------------------------------------------------

const fixed = (value, digits) => value.toFixed(digits).replace("-", "−");
const signed = (value) => (Number(value.toFixed(1)) > 0 ? "+" : "") + fixed(value, 1);
const percent = (fraction) => `${fixed(100 * fraction, 2)} %`;
const short = (value) => String(Number(value.toPrecision(3)));
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const distinct = (values) => [...new Set(values)];
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function nice(low, high, count) {
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10]
    .map((factor) => factor * power)
    .find((value) => value >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(Math.ceil(high / step - 1e-9), first + 1);
  return Array.from({ length: last - first + 1 }, (_, place) => (first + place) * step);
}

function decades(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    ticks.push(...(high / low < 200 ? [1, 2, 5] : [1]).map((factor) => factor * 10 ** power));
  }
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

// --- what is chosen -------------------------------------------------------------------------

const isOn = (kind, value) => !chosen.off[kind].has(value);
const look = (name) => data.optimizers.find((other) => other.name === name);

function settingsShown() {
  return data.settings
    .map((setting, place) => ({ ...setting, place }))
    .filter(
      (setting) =>
        setting.task === chosen.task && (!chosen.spread || setting.spread === chosen.spread),
    )
    .filter((setting) =>
      ["objective", "server", "setup"].every((kind) => isOn(kind, setting[kind])),
    );
}
const linesOf = (setting) =>
  data.lines.filter((line) => line.setting === setting.place && isOn("optimizer", line.optimizer));
const titleOf = (setting) => [setting.spread, ...setting.extras].join(", ");

// --- controls -------------------------------------------------------------------------------

function select(title, key, options, value, change) {
  const control = make("select", { id: `choose-${key}` });
  for (const [text, option] of options)
    control.append(make("option", { value: option, selected: option === value ? "" : null }, text));
  control.addEventListener("change", () => change(control.value));
  return make("label", { class: "choice" }, make("span", {}, title), control);
}

function boxes(title, kind, values) {
  const row = make("div", { class: "boxes" });
  values.forEach((value, place) => {
    const box = make("input", { type: "checkbox", id: `${kind}-${place}`, name: kind });
    box.checked = isOn(kind, value);
    box.addEventListener("change", () => {
      chosen.off[kind][box.checked ? "delete" : "add"](value);
      update();
    });
    const style = kind === "optimizer" ? look(value) : null;
    const text = make("span", { class: style?.ours ? "ours" : null }, value || "as usual");
    row.append(make("label", {}, box, ...(style ? [swatch(style)] : []), text));
  });
  return make(
    "fieldset",
    { class: kind === "optimizer" ? "whole" : null },
    make("legend", {}, title),
    row,
  );
}

function controls() {
  const tasks = distinct(data.settings.map((setting) => setting.task));
  if (!tasks.includes(chosen.task)) chosen.task = tasks[0] ?? "";
  const mine = data.settings.filter((setting) => setting.task === chosen.task);
  const spreads = distinct(mine.map((setting) => setting.spread));
  if (!spreads.includes(chosen.spread)) chosen.spread = "";
  const places = new Set(mine.map((setting) => data.settings.indexOf(setting)));
  const here = new Set(
    data.lines.filter((line) => places.has(line.setting)).map((line) => line.optimizer),
  );

  const focused = document.activeElement?.id;
  const form = byId("controls");
  form.replaceChildren(
    select(
      "Task",
      "task",
      tasks.map((task) => [task, task]),
      chosen.task,
      (task) => {
        chosen.task = task;
        controls();
        update();
      },
    ),
    select(
      "Heterogeneity",
      "spread",
      [["all", ""], ...spreads.map((spread) => [spread, spread])],
      chosen.spread,
      (spread) => {
        chosen.spread = spread;
        update();
      },
    ),
    select(
      "Curve",
      "measure",
      [
        ["test accuracy", "accuracy"],
        ["test loss", "loss"],
      ],
      chosen.measure,
      (measure) => {
        chosen.measure = measure;
        update();
      },
    ),
  );
  for (const [title, kind] of [
    ["Objective", "objective"],
    ["Server", "server"],
    ["Setup", "setup"],
  ]) {
    const values = distinct(mine.map((setting) => setting[kind]));
    if (values.length > 1) form.append(boxes(title, kind, values));
  }
  form.append(
    boxes(
      "Client optimizers",
      "optimizer",
      data.optimizers.map((o) => o.name).filter((name) => here.has(name)),
    ),
  );
  if (focused) byId(focused)?.focus();
}
byId("controls").addEventListener("submit", (event) => event.preventDefault());

// --- charts ---------------------------------------------------------------------------------

let frames = [];

// A picture that can be read position by position, by pointer or by arrow keys. `paint` draws it
// for a width and returns the svg, where a position lies, and what marks it.
function frame({ label, summary, positions, vertical, paint, tell }) {
  const host = make("div", {
    class: "frame",
    role: "slider",
    tabindex: 0,
    "aria-label": label,
    "aria-orientation": vertical ? "vertical" : "horizontal",
    "aria-valuemin": positions[0],
    "aria-valuemax": positions.at(-1),
  });
  const about = make("p", { class: "away", id: `about-${frames.length}` }, summary);
  host.setAttribute("aria-describedby", about.id);
  let picture = null;
  let place = positions.length - 1;
  let tip = null;

  function value() {
    const { title, rows } = tell(place);
    host.setAttribute("aria-valuenow", positions[place]);
    host.setAttribute(
      "aria-valuetext",
      `${title}: ${rows.map((row) => `${row.name} ${row.value}`).join("; ") || "nothing"}`,
    );
    return { title, rows };
  }
  function hide() {
    tip?.remove();
    tip = null;
    picture?.marks.replaceChildren();
  }
  function show(next) {
    place = Math.min(Math.max(next, 0), positions.length - 1);
    const { title, rows } = value();
    tip?.remove();
    const body = make("table", {});
    for (const row of rows) {
      body.append(
        make(
          "tr",
          {},
          make("td", {}, row.look ? swatch(row.look) : row.patch ? patch(row.patch) : ""),
          make("td", {}, row.name),
          make("td", { class: "number" }, row.value),
        ),
      );
    }
    tip = make("div", { class: "tip", "aria-hidden": "true" }, make("strong", {}, title), body);
    host.append(tip);
    picture.marks.replaceChildren(...picture.mark(place));
    // Beside the position, on the side that has room.
    const [x, y] = picture.at(place);
    const left = x > host.clientWidth / 2 ? x - tip.offsetWidth - 12 : x + 12;
    tip.style.left = `${Math.min(Math.max(left, 0), host.clientWidth - tip.offsetWidth)}px`;
    tip.style.top = `${vertical ? Math.min(y + 8, Math.max(host.clientHeight - tip.offsetHeight, 0)) : 4}px`;
  }
  function nearest(event) {
    const box = host.getBoundingClientRect();
    const target = vertical ? event.clientY - box.top : event.clientX - box.left;
    let best = 0;
    for (let other = 1; other < positions.length; other += 1) {
      const gap = (which) => Math.abs(picture.at(which)[vertical ? 1 : 0] - target);
      if (gap(other) < gap(best)) best = other;
    }
    return best;
  }
  const steps = {
    ArrowLeft: -1,
    ArrowRight: 1,
    ArrowUp: vertical ? -1 : 1,
    ArrowDown: vertical ? 1 : -1,
    PageUp: -10,
    PageDown: 10,
    Home: -Infinity,
    End: Infinity,
  };
  host.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (!(event.key in steps)) return;
    event.preventDefault();
    show(place + steps[event.key]);
  });
  host.addEventListener("pointermove", (event) => show(nearest(event)));
  host.addEventListener("pointerdown", (event) => show(nearest(event)));
  host.addEventListener("pointerleave", hide);
  host.addEventListener("blur", hide);
  frames.push({
    host,
    paint(width) {
      hide();
      picture = paint(width);
      picture.marks = draw("g", {});
      picture.svg.setAttribute("aria-hidden", "true");
      picture.svg.append(picture.marks);
      host.replaceChildren(picture.svg);
      value();
    },
  });
  return make("div", {}, host, about);
}

function paintAll() {
  for (const { host, paint } of frames) if (host.clientWidth) paint(host.clientWidth);
}

function path(points) {
  let text = "";
  let pen = "M";
  for (const point of points) {
    if (point === null) pen = "M";
    else {
      text += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
      pen = "L";
    }
  }
  return text;
}

function area(upper, lower) {
  const parts = [];
  let from = 0;
  for (let place = 0; place <= upper.length; place += 1) {
    if (place < upper.length && upper[place] !== null) continue;
    if (place - from > 1)
      parts.push(`${path([...upper.slice(from, place), ...lower.slice(from, place).reverse()])}Z`);
    from = place + 1;
  }
  return parts.join("");
}

// Lines over a common x; `ticks` also fix the range of y.
function lineChart({ label, summary, xTitle, yTitle, series, ticks, range, log, format, tell }) {
  const known = series.flatMap((line) => line.x.filter((_, place) => line.y[place] !== null));
  const positions = distinct(known).sort((a, b) => a - b);
  const index = series.map((line) => new Map(line.x.map((x, place) => [x, place])));
  const [low, high] = range ?? [ticks[0], ticks.at(-1)];
  const [first, last] = [positions[0], positions.at(-1)];

  function paint(width) {
    const height = Math.round(Math.min(340, Math.max(230, width * 0.62)));
    const edge = { left: 46, right: 14, top: 28, bottom: 40 };
    const toX = (x) =>
      edge.left + ((x - first) / (last - first || 1)) * (width - edge.left - edge.right);
    const part = log
      ? (y) => Math.log(y / low) / Math.log(high / low)
      : (y) => (y - low) / (high - low);
    const toY = (y) =>
      height -
      edge.bottom -
      part(Math.min(Math.max(y, low), high)) * (height - edge.top - edge.bottom);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height });
    for (const tick of ticks) {
      const y = toY(tick);
      svg.append(
        draw("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y, y2: y }),
      );
      svg.append(draw("text", { x: edge.left - 8, y: y + 4, "text-anchor": "end" }, format(tick)));
    }
    const floor = height - edge.bottom;
    svg.append(
      draw("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: floor, y2: floor }),
    );
    const steps = nice(first, last, width < 420 ? 4 : 6).filter(
      (x) => x >= first && x <= last && Number.isInteger(x),
    );
    for (const x of steps)
      svg.append(draw("text", { x: toX(x), y: floor + 17, "text-anchor": "middle" }, String(x)));
    svg.append(
      draw("text", { x: width - edge.right, y: height - 4, "text-anchor": "end" }, xTitle),
    );
    svg.append(draw("text", { x: 0, y: 12 }, yTitle));
    const at = (line, place, shift = 0) =>
      line.y[place] === null
        ? null
        : [toX(line.x[place]), toY(line.y[place] + shift * line.deviation[place])];
    for (const line of series.filter((other) => other.deviation?.some((value) => value !== null))) {
      const edges = [1, -1].map((sign) =>
        line.x.map((_, place) => (line.deviation[place] === null ? null : at(line, place, sign))),
      );
      svg.append(draw("path", { class: "band", color: line.look.color, d: area(...edges) }));
    }
    for (const line of series) {
      svg.append(
        draw("path", {
          class: "line",
          color: line.look.color,
          "data-line": line.name,
          "stroke-width": line.look.width,
          "stroke-dasharray": line.look.dash,
          d: path(
            line.x.map((_, place) =>
              line.y[place] === null ? null : [toX(line.x[place]), toY(line.y[place])],
            ),
          ),
        }),
      );
      const known = line.y.filter((y) => y !== null);
      if (known.length === 1)
        svg.append(
          draw("circle", {
            class: "dot",
            color: line.look.color,
            r: 3,
            cx: toX(line.x[line.y.indexOf(known[0])]),
            cy: toY(known[0]),
          }),
        );
    }
    return {
      svg,
      at: (place) => [toX(positions[place]), edge.top],
      mark: (place) => {
        const x = toX(positions[place]);
        const dots = series.flatMap((line, which) => {
          const spot = index[which].get(positions[place]);
          return spot === undefined || line.y[spot] === null
            ? []
            : [
                draw("circle", {
                  class: "dot",
                  color: line.look.color,
                  r: 4,
                  cx: x,
                  cy: toY(line.y[spot]),
                }),
              ];
        });
        return [draw("line", { class: "cursor", x1: x, x2: x, y1: edge.top, y2: floor }), ...dots];
      },
    };
  }
  const rows = (place) =>
    series.flatMap((line, which) => {
      const spot = index[which].get(positions[place]);
      return spot === undefined || line.y[spot] === null ? [] : [{ line, spot }];
    });
  return frame({
    label,
    summary,
    positions,
    paint,
    tell: (place) => tell(positions[place], rows(place)),
  });
}

// --- sections -------------------------------------------------------------------------------

const panel = (title, ...children) =>
  make("div", { class: "panel" }, make("h3", {}, title), ...children);
const patch = (color) => {
  const spot = make("span", { class: "patch" });
  spot.style.background = color;
  return spot;
};

function curves(settings) {
  const accuracy = chosen.measure === "accuracy";
  const panels = settings
    .map((setting) => ({
      setting,
      series: linesOf(setting)
        .map((line) => ({
          name: line.optimizer,
          look: look(line.optimizer),
          x: line.rounds,
          n: line.n,
          y: line[chosen.measure],
          deviation: line[`${chosen.measure}Deviation`],
        }))
        .filter((line) => line.y.some((y) => y !== null))
        // Painted one over the other: ours belong on top.
        .sort((a, b) => Number(a.look.ours) - Number(b.look.ours)),
    }))
    .filter(({ series }) => series.length);
  if (!panels.length) {
    byId("curves").replaceChildren(
      make("p", { class: "note" }, "Nothing is chosen that has a curve yet."),
    );
    return;
  }
  // All panels share their range, so that the effect of the heterogeneity shows.
  const reach = (sign) =>
    panels.flatMap(({ series }) =>
      series.flatMap((line) =>
        line.y.flatMap((y, place) => (y === null ? [] : [y + sign * (line.deviation[place] ?? 0)])),
      ),
    );
  const low = Math.max(0, least(reach(-1)));
  const high = accuracy
    ? Math.min(100, most(reach(1)))
    : most(panels.flatMap(({ series }) => series.flatMap((line) => line.y)));
  const ticks = nice(low, high, 5);
  const value = (y, deviation) =>
    fixed(y, accuracy ? 1 : 3) +
    (deviation === null ? "" : ` ±${fixed(deviation, accuracy ? 1 : 3)}`) +
    (accuracy ? " %" : "");
  byId("curves").replaceChildren(
    ...panels.map(({ setting, series }) => {
      const ends = [...series].reverse().map((line) => {
        const last = line.y.findLastIndex((y) => y !== null);
        return `${line.name} ${value(line.y[last], line.deviation[last])} in round ${line.x[last]}`;
      });
      return panel(
        titleOf(setting),
        lineChart({
          label: `${accuracy ? "Test accuracy" : "Test loss"} over rounds, ${setting.label}`,
          summary: `The last points: ${ends.join("; ")}.`,
          xTitle: "Round",
          yTitle: accuracy ? "Test accuracy (%)" : "Test loss",
          series,
          ticks,
          format: short,
          tell: (round, rows) => ({
            title: `Round ${round}`,
            rows: rows
              .sort((a, b) => (b.line.y[b.spot] - a.line.y[a.spot]) * (accuracy ? 1 : -1))
              .map(({ line, spot }) => ({
                name: line.name,
                look: line.look,
                value: value(line.y[spot], line.deviation[spot]),
              })),
          }),
        }),
      );
    }),
  );
}

function table(settings) {
  const shown = settings.filter((setting) => linesOf(setting).length);
  const names = data.optimizers.filter(
    (o) =>
      isOn("optimizer", o.name) &&
      shown.some((setting) => linesOf(setting).some((line) => line.optimizer === o.name)),
  );
  byId("sentence").textContent = data.sentences[chosen.task] ?? "";
  if (!names.length) {
    byId("table").replaceChildren(make("p", { class: "note" }, "Nothing is chosen."));
    return;
  }
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, "Optimizer"),
    ...shown.map((setting) => make("th", { scope: "col" }, titleOf(setting))),
  );
  const rows = names.map((optimizer) =>
    make(
      "tr",
      {},
      make("th", { scope: "row", class: optimizer.ours ? "ours" : null }, optimizer.name),
      ...shown.map((setting) =>
        cell(linesOf(setting).find((line) => line.optimizer === optimizer.name)),
      ),
    ),
  );
  const theirs = data.lines.some((line) => line.theirs !== null);
  const caption =
    `${chosen.task}: final test accuracy in percent, mean ± sample standard deviation over n seeds. ` +
    "Bold: within 0.5 points of the best optimizer of its column, ticked or not; otherwise the points below that best." +
    (theirs ? " “Paper” is the published number, and how far ours is from it." : "");
  byId("table").replaceChildren(
    make(
      "table",
      {},
      make("caption", {}, caption),
      make("thead", {}, head),
      make("tbody", {}, ...rows),
    ),
  );
}

function cell(line) {
  if (!line) return make("td", {}, "–");
  const parts = [];
  const { final, theirs, going } = line;
  if (final) {
    parts.push(
      make(
        "span",
        { class: final.best ? "best" : null },
        fixed(final.mean, 1) + (final.n > 1 ? ` ±${fixed(final.std, 1)}` : ""),
      ),
    );
    const below = final.best ? "" : `−${fixed(final.below, 1)}`;
    parts.push(
      make(
        "small",
        {},
        `n = ${final.n}`,
        ...(below ? [", ", make("span", { class: final.below > 2 ? "far" : null }, below)] : []),
      ),
    );
  }
  if (going.length) {
    const [done, total] = going[0];
    parts.push(
      make(
        "small",
        {},
        going.length === 1 ? `round ${done} of ${total}` : `${going.length} not finished`,
      ),
    );
  }
  if (theirs !== null)
    parts.push(
      make(
        "small",
        {},
        `paper ${fixed(theirs, 1)}` + (final ? ` (${signed(final.mean - theirs)})` : ""),
      ),
    );
  return make("td", {}, ...parts);
}

const runsShown = (settings) => {
  const places = new Set(settings.map((setting) => setting.place));
  return data.runs.filter((run) => {
    const line = data.lines[run.line];
    return line
      ? places.has(line.setting) && isOn("optimizer", line.optimizer)
      : run.task === chosen.task;
  });
};
const optimizerOf = (run) => data.lines[run.line]?.optimizer ?? run.optimizer;
const settingOf = (run) => data.settings[data.lines[run.line]?.setting];
const runTitle = (run) =>
  [optimizerOf(run), settingOf(run) && titleOf(settingOf(run)), `seed ${run.seed}`]
    .filter(Boolean)
    .join(", ");

const CONDITIONS = [
  ["growth", "second condition (growth)", { color: "#56B4E9", width: 4, dash: "" }],
  ["smoothness", "first condition (local smoothness)", { color: "#009E73", width: 1.2, dash: "" }],
  ["eta", "step size η (the minimum)", { color: "#D55E00", width: 1.8, dash: "" }],
];

function steps(settings) {
  const recorded = runsShown(settings).filter((run) => run.steps.length);
  byId("steps-section").hidden = !recorded.length;
  if (!recorded.length) return byId("steps").replaceChildren();
  const run = recorded.find((other) => other.name === chosen.steps) ?? recorded[0];
  const focused = document.activeElement?.id === "choose-steps";
  byId("steps-choice").replaceChildren(
    select(
      "Run",
      "steps",
      recorded.map((other) => [runTitle(other), other.name]),
      run.name,
      (name) => {
        chosen.steps = name;
        update();
      },
    ),
    make(
      "ul",
      { class: "legend" },
      ...[...CONDITIONS].reverse().map(([, text, style]) => make("li", {}, swatch(style), text)),
    ),
  );
  if (focused) byId("choose-steps").focus();
  const series = CONDITIONS.map(([, name, style]) => ({ name, look: style, x: [], y: [] }));
  const rounds = new Map();
  run.steps.forEach(([round, start, smoothness, growth, eta]) => {
    [growth, smoothness, eta].forEach((values, which) => {
      // A gap between two rounds: another client starts anew.
      series[which].x.push(start + 0.5, ...values.map((_, place) => start + place + 1));
      series[which].y.push(null, ...values.map((value) => (value > 0 ? value : null)));
    });
    eta.forEach((_, place) => rounds.set(start + place + 1, [round, place + 1]));
  });
  const values = series.flatMap((line) => line.y.filter((y) => y !== null));
  const taken = series[2].y.filter((y) => y !== null).sort((a, b) => a - b);
  if (!taken.length)
    return byId("steps").replaceChildren(
      make("p", { class: "note" }, "No step size of this run is a finite number."),
    );
  const [low, high] = [least(values) / 1.2, most(values) * 1.2];
  byId("steps").replaceChildren(
    lineChart({
      label: `Step sizes over local steps, ${runTitle(run)}`,
      summary: `The step size lies between ${short(taken[0])} and ${short(taken.at(-1))}, its median is ${short(taken[taken.length >> 1])}.`,
      xTitle: "Local step",
      yTitle: "Step size (logarithmic)",
      series,
      ticks: decades(low, high),
      range: [low, high],
      log: true,
      format: short,
      tell: (step, rows) => {
        const [round, within] = rounds.get(step);
        return {
          title: `Round ${round}, step ${within}`,
          rows: rows.reverse().map(({ line, spot }) => ({
            name: line.name,
            look: line.look,
            value: short(line.y[spot]),
          })),
        };
      },
    }),
  );
}

const classColor = (label, classes) =>
  classes <= data.classColors.length
    ? data.classColors[label]
    : `hsl(${Math.round((330 * label) / classes)} 60% 52%)`;

function partitions(settings) {
  const places = new Set(settings.map((setting) => setting.place));
  const shown = data.partitions.filter((picture) =>
    picture.settings.some((place) => places.has(place)),
  );
  byId("partitions-section").hidden = !shown.length;
  const drawn = shown.filter((picture) => !picture.note);
  const classes = drawn[0]?.classes ?? [];
  byId("classes").replaceChildren(
    ...(classes.length <= data.classColors.length
      ? classes.map((name, label) => make("li", {}, patch(classColor(label, classes.length)), name))
      : []),
  );
  const spread = (picture) =>
    distinct(
      picture.settings
        .filter((place) => places.has(place))
        .map((place) => data.settings[place])
        .map((setting) => [setting.spread, setting.setup].filter(Boolean).join(", ")),
    ).join("; ");
  byId("partitions").replaceChildren(
    ...drawn.map((picture) => panel(spread(picture), holdings(picture, spread(picture)))),
    ...distinct(shown.filter((picture) => picture.note).map((picture) => picture.note)).map(
      (note) => make("p", { class: "note" }, note),
    ),
  );
}

function holdings({ held, classes, clients, seed }, title) {
  const totals = held.map((row) => row.reduce((sum, [, count]) => sum + count, 0));
  const kinds = held.map((row) => row.length).sort((a, b) => a - b);
  const of =
    held.length < clients
      ? `The first ${held.length} of ${clients} clients`
      : `All ${plural(clients, "client")}`;
  const about = `${of}, seed ${seed}. A client holds samples of ${kinds[kinds.length >> 1]} of ${plural(classes.length, "class").replace("classs", "classes")} in the median.`;
  const picture = frame({
    label: `Classes of each client, ${title}`,
    summary: about,
    vertical: true,
    positions: held.map((_, client) => client),
    tell: (client) => {
      const sorted = [...held[client]].sort((a, b) => b[1] - a[1]);
      const rows = sorted.slice(0, 6).map(([label, count]) => ({
        name: classes[label],
        patch: classColor(label, classes.length),
        value: `${count} (${fixed((100 * count) / totals[client], 0)} %)`,
      }));
      if (sorted.length > 6) rows.push({ name: `and ${sorted.length - 6} more`, value: "" });
      return { title: `Client ${client}, ${plural(totals[client], "sample")}`, rows };
    },
    paint: (width) => {
      const step = Math.min(16, Math.max(3, 340 / held.length));
      const [left, top] = [30, 2];
      const height = top + step * held.length + 22;
      const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height });
      const every = held.length > 20 ? Math.ceil(held.length / 100) * 10 : held.length > 10 ? 5 : 1;
      const toX = (share) => left + share * (width - left - 14);
      held.forEach((row, client) => {
        const y = top + client * step;
        if (client % every === 0)
          svg.append(
            draw(
              "text",
              { x: left - 6, y: y + step / 2 + 4, "text-anchor": "end" },
              String(client),
            ),
          );
        let before = 0;
        for (const [label, count] of row) {
          const [x, end] = [toX(before / totals[client]), toX((before + count) / totals[client])];
          svg.append(
            draw("rect", {
              x,
              y,
              width: Math.max(end - x, 0.5),
              height: Math.max(step - (step > 5 ? 1 : 0.4), 1),
              fill: classColor(label, classes.length),
            }),
          );
          before += count;
        }
      });
      for (const share of [0, 0.5, 1])
        svg.append(
          draw(
            "text",
            {
              x: toX(share),
              y: height - 4,
              "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle",
            },
            `${100 * share} %`,
          ),
        );
      return {
        svg,
        at: (client) => [width / 2, top + (client + 0.5) * step],
        mark: (client) => [
          draw("rect", {
            class: "hit",
            x: left,
            y: top + client * step - 0.5,
            width: width - left - 14,
            height: step,
          }),
        ],
      };
    },
  });
  return make("div", {}, picture, make("p", { class: "note" }, about));
}

// --- runs -----------------------------------------------------------------------------------

function duration(seconds) {
  if (seconds < 120) return `${fixed(seconds, seconds < 10 ? 2 : 1)} s`;
  if (seconds < 7200) return `${fixed(seconds / 60, 1)} min`;
  return `${fixed(seconds / 3600, 1)} h`;
}

function code(title, text) {
  const block = make("pre", { tabindex: 0, "aria-label": title }, text);
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      say(`${title}: copied.`);
    } catch {
      getSelection().selectAllChildren(block);
      button.textContent = "Selected";
      say(`${title}: selected, copy it with the keyboard.`);
    }
  });
  return [make("div", { class: "code" }, make("h3", {}, title), button), block];
}

function facts(run) {
  const rows = [
    ["Folder", run.name],
    ["Scale", run.scale],
    ["Rounds", run.finished ? `${run.done}` : `${run.done} of ${run.total}, not finished`],
    ["Final accuracy", run.accuracy === null ? null : percent(run.accuracy)],
    ["Best accuracy", run.best === null ? null : percent(run.best)],
    ["Final test loss", run.loss === null ? null : fixed(run.loss, 4)],
    [
      "Time",
      run.seconds === null
        ? null
        : `${duration(run.seconds)}, ${short(run.seconds / Math.max(run.done, 1))} s a round`,
    ],
    ["Finished", run.when],
    ["Refused updates", run.refused],
    ["Diverged", run.diverged],
    ["Compiled kernels", run.native === null ? null : run.native ? "yes" : "no"],
    [
      "Versions",
      Object.entries(run.versions)
        .map(([name, version]) => `${name} ${version}`)
        .join(", "),
    ],
    ["weights_sha256", run.sha256],
  ];
  const list = make("dl", {});
  for (const [name, value] of rows) {
    if (value !== null && value !== undefined && value !== "")
      list.append(make("dt", {}, name), make("dd", {}, String(value)));
  }
  const command =
    run.command === null
      ? [
          make(
            "p",
            { class: "note" },
            "This run was given data of its own in Python: no command repeats it.",
          ),
        ]
      : code("Command", run.command);
  return make("div", { class: "about" }, list, ...command, ...code("Configuration", run.config));
}

function runs(settings) {
  byId("runs").replaceChildren(
    ...runsShown(settings).map((run) => {
      const name = make(
        "span",
        { class: look(optimizerOf(run))?.ours ? "ours" : null },
        optimizerOf(run),
      );
      const where = [
        settingOf(run) && titleOf(settingOf(run)),
        `seed ${run.seed}`,
        run.line === null && "not averaged: another run has its seed",
      ];
      const outcome = run.finished
        ? percent(run.accuracy)
        : `round ${run.done} of ${run.total}` +
          (run.latest === null ? "" : `, ${percent(run.latest)}`);
      const row = make(
        "summary",
        {},
        name,
        make("span", { class: "quiet" }, where.filter(Boolean).join(", ")),
        make("span", { class: "number" }, outcome),
      );
      const box = make("details", { class: "runs-of", "data-run": run.name }, row);
      const unfold = () => {
        if (box.open && box.children.length === 1) box.append(facts(run));
      };
      box.open = chosen.open.has(run.name);
      unfold();
      box.addEventListener("toggle", () => {
        chosen.open[box.open ? "add" : "delete"](run.name);
        unfold();
      });
      return box;
    }),
  );
}

// --- all of it ------------------------------------------------------------------------------

// Set only when it changes: a screen reader speaks whatever is set.
const say = (text) => {
  if (byId("status").textContent !== text) byId("status").textContent = text;
};

function render() {
  // Whoever reads a chart by keyboard keeps the place when new rounds come in.
  const focused =
    document.activeElement?.getAttribute("role") === "slider"
      ? document.activeElement.getAttribute("aria-label")
      : null;
  const folded = document.activeElement?.closest("details")?.dataset.run;
  frames = [];
  const settings = settingsShown();
  curves(settings);
  table(settings);
  steps(settings);
  partitions(settings);
  runs(settings);
  paintAll();
  if (focused) frames.find(({ host }) => host.getAttribute("aria-label") === focused)?.host.focus();
  if (folded)
    [...document.querySelectorAll("details")]
      .find((box) => box.dataset.run === folded)
      ?.querySelector("summary")
      .focus();
}

function update() {
  render();
  const settings = settingsShown();
  const names = distinct(
    settings.flatMap((setting) => linesOf(setting).map((line) => line.optimizer)),
  );
  say(
    `Shown: ${plural(names.length, "optimizer")}, ${plural(settings.length, "setting")}, ${plural(runsShown(settings).length, "run")}.`,
  );
}

function overview() {
  const going = data.runs.filter((run) => !run.finished);
  const latest = going.reduce((best, run) => (best && best.done >= run.done ? best : run), null);
  const parts = [plural(data.runs.length, "run")];
  if (going.length)
    parts.push(
      `${going.length} not finished${data.live ? `, ${optimizerOf(latest)} at round ${latest.done} of ${latest.total}` : ""}`,
    );
  byId("title").textContent = data.title;
  byId("overview").textContent = data.runs.length ? parts.join("; ") : "Waiting for the first run.";
  byId("made").textContent =
    `Made by deltafl ${data.version}. This page asks no other host for anything.`;
  byId("warnings-section").hidden = !data.warnings.length;
  byId("warnings").replaceChildren(...data.warnings.map((line) => make("li", {}, line)));
}

let offered = "";
function refresh() {
  overview();
  // New choices only where there are some: whoever is using a control is not interrupted.
  const choices = JSON.stringify([
    data.settings,
    data.lines.map((line) => [line.setting, line.optimizer]),
    data.optimizers,
  ]);
  if (choices !== offered) controls();
  offered = choices;
  render();
}

const theme = byId("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () =>
  (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
const showTheme = () => theme.setAttribute("aria-pressed", String(isDark()));
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
prefersDark.addEventListener("change", showTheme);
showTheme();
refresh();
update();

let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== width) paintAll();
  width = document.body.clientWidth;
}).observe(document.body);

// A live page asks its own server, and nobody else, for what is new.
let tag = null;
let told = 0;
async function poll() {
  try {
    const answer = await fetch("data.json", {
      cache: "no-store",
      headers: tag ? { "If-None-Match": tag } : {},
    });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      data = { ...(await answer.json()), live: true };
      refresh();
      // Rounds may be quick, and a screen reader is not.
      if (Date.now() - told > 10000) {
        told = Date.now();
        say(byId("overview").textContent);
      }
    }
  } catch {
    say("The server does not answer. This is what it last said.");
  }
  setTimeout(poll, 1500);
}
if (data.live) setTimeout(poll, 1500);
