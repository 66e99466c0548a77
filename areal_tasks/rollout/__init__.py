"""Generation that runs ahead of training: the staleness rule, the leases of workers, groups that wait in the store."""
