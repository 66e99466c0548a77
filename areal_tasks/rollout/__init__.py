"""Generation that runs ahead of training: the staleness rule, who generates what, what waits in the store."""
