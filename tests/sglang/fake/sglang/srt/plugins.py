def load_plugins() -> None:
    print("plugins loaded")
