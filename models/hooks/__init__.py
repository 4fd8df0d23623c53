"""What our hooks on a module can see and change: sides, attention, tensors inside structures."""
