"""`hookline new KIND NAME`: write a distribution with a plugin of that kind, runnable and tested from the start.

Fills in the templates in two folders of core/new/templates: common/ and the folder of the kind. Imports no plugin and
no torch.
"""
