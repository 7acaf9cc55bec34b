"""What was asked for: schema, settings, Hydra."""
