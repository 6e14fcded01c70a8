"""What a client holds: data sets by name, the samples of one client, and who holds which."""

from deltafl.data.augment import AUGMENTATIONS as AUGMENTATIONS
from deltafl.data.augment import Augmentation as Augmentation
from deltafl.data.augment import augmentation as augmentation
from deltafl.data.augment import crop_flip as crop_flip
from deltafl.data.dataset import AnyDataset as AnyDataset
from deltafl.data.dataset import Dataset as Dataset
from deltafl.data.dataset import Samples as Samples
from deltafl.data.dataset import Split as Split
from deltafl.data.library import Status as Status
from deltafl.data.library import get as get
from deltafl.data.library import load as load
from deltafl.data.library import names as names
from deltafl.data.library import status as status
from deltafl.data.library import verify as verify
from deltafl.data.partition import Partition as Partition
from deltafl.data.partition import make_partition as make_partition
from deltafl.data.places import folders as folders
from deltafl.data.text.dataset import TextDataset as TextDataset
from deltafl.data.text.dataset import Texts as Texts
