"""A Flower app of one's own: only the lines with deltafl are not Flower's or PyTorch's."""
