"""The rollout worker: a process that runs workflows, and holds and writes the groups that they produce."""
