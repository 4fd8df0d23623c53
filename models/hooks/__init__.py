"""What our hooks on a module can see and change: sites, functions, attention, tensors inside structures."""
