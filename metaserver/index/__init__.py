"""Indexes over immutable files: columnar blocks of manifests, and the kernels that scan them."""
