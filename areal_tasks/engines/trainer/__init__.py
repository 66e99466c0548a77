"""The trainer service: a resident process that holds a policy and its optimizer and runs small JSON commands.

`process` serves HTTP, `service` runs commands, `fencing` handles retries and superseded owners, `plan` divides samples
into minibatches and passes, `learner` runs them, `objective` defines the loss, and a backend (`local`, `fsdp2`,
`deepspeed_backend`) owns model and optimizer.
"""
