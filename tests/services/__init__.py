"""Real services as processes: a file for each service; each uses 127.0.0.1 and a free port, and ends with its context.

The configuration files are those in `deploy/`, which `docker-compose.yml` mounts, so that the tests check what an
operator starts. Downloads are in `.cache/`; make targets put them there, never a test.
"""
