"""The trainer service: a resident process that holds a policy and its optimizer and runs small JSON commands.

`app` serves HTTP, `service` runs commands, `fencing` handles retries and refuses superseded owners, `learner` runs an
iteration's minibatches, `objective` defines the loss, and a `backend` owns model and optimizer.
"""
