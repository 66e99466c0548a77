"""The trainer service: a resident process that holds a policy and its optimizer and obeys small JSON commands.

`app` listens, `service` obeys, `fencing` refuses repeats and ghosts, `learner` runs the minibatches of an iteration,
`objective` says what is minimised, and a `backend` owns model and optimizer.
"""
