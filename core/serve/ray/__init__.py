"""The server as a Ray Serve application: Ray's proxies hand each HTTP request whole to a replica, where it ends."""
