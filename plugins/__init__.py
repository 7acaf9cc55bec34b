"""The plugins that ship with Hookline: a package for each kind."""
