"""Real services as processes.

Each service has a file. It uses 127.0.0.1 and a free port, and ends with its context. The configuration files are those
in `deploy/`, which `docker-compose.yml` mounts, so the tests check the files that an operator uses. Downloads are in
`.cache/`. Make targets put them there, and tests never download.
"""
