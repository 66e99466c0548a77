"""The rollout worker: a process that runs the workflow of groups, and holds and writes what comes of it."""
