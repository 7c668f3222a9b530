"""Tests of the Helm chart in deploy/helm/seamark.

`make test` checks the rendered manifests in `rendered/` without helm. `make helm` renders them again with helm, and
runs `with_helm.py`.
"""
