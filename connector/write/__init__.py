"""Tables written: data files, delete files, and the commits that add them."""
