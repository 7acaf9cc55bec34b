"""The configuration: its schema, its checks, and its composition by Hydra."""
