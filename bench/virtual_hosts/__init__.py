"""Hosts made of network namespaces."""
