"""What a configuration needs of each GPU and of the network, from the configuration alone."""
