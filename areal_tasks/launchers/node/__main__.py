"""`python -m areal_tasks.launchers.node`: the node agent, as a cluster system starts it."""

from areal_tasks.launchers.node.agent import main

main()
