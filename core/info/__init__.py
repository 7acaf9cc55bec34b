"""`hookline info`: the installed plugins, options and presets, where they come from, and why some cannot be used.

Reads the plugin host and the presets; imports no target, no torch and no Hydra, so it answers at once and works where
nothing can run. `hookline.core.info.layout` lays the facts out.
"""
