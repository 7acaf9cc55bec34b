"""Before a rank is ready: the size of its cache, the steps that warm it up, and a count of what is compiled later."""
