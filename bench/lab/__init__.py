"""Several hosts made of network namespaces on one machine."""
