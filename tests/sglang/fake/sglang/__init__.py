"""A stand-in for SGLang: the modules that our launcher imports, and a server that answers health and model info."""
