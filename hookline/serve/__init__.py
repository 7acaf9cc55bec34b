"""`hookline.serve.ray`: the server for Ray Serve. The server itself is the command `hookline serve`."""
