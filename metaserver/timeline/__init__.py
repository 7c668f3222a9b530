"""The timeline: a log of instants, which clients read, watch and archive, and which webhooks receive."""
