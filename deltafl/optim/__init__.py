"""How a client steps: Δ-SGD, SPS, and the catalog of optimizers by name."""

from deltafl.optim._shared import StepRecord as StepRecord
from deltafl.optim.catalog import Entry as Entry
from deltafl.optim.catalog import build as build
from deltafl.optim.catalog import lookup as lookup
from deltafl.optim.catalog import lr_factor as lr_factor
from deltafl.optim.catalog import names as names
from deltafl.optim.delta_sgd import DeltaSGD as DeltaSGD
from deltafl.optim.sps import SPS as SPS
