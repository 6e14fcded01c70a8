"""A plain transformers loop: texts padded to 128 tokens each, the order shuffled; one thread."""

from __future__ import annotations

import torch

from benchmarks.systems.gate import Gate, arguments
from deltafl.experiment import Config
from deltafl.experiment.federation import build_setup
from deltafl.models import pretrained, text


def main() -> None:
    """Train on the samples of client 0 of a configuration; a round is a pass over them."""
    config = Config().override(**arguments()["config"])
    setup = build_setup(config)
    rows = setup.partition.indices(0)
    samples = setup.dataset.samples(setup.dataset.train, rows)
    ids = torch.zeros(len(rows), text.MAX_TOKENS, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place in range(len(rows)):
        tokens = samples.batch(torch.tensor([place]))[0]["input_ids"][0]
        ids[place, : len(tokens)], mask[place, : len(tokens)] = tokens, 1
    labels = samples.batch(torch.arange(len(rows)))[1]
    library = text.transformers(config.model_name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = library.AutoModelForSequenceClassification.from_pretrained(
        pretrained.folder_of(config.model_name, None), num_labels=setup.dataset.num_classes
    ).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=config.client.lr or 0.1)
    gate = Gate()
    gate.open()
    while True:
        for batch in torch.randperm(len(rows)).split(config.client.batch_size):
            optimizer.zero_grad()
            answer = net(input_ids=ids[batch], attention_mask=mask[batch], labels=labels[batch])
            answer.loss.backward()
            optimizer.step()
        gate.tick()


if __name__ == "__main__":
    main()
