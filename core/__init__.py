"""The engine. Its import name is `hookline.core`; users' names are in `hookline`."""
