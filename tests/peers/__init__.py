"""The libraries that people use instead, beside requests on the same weights; ``make peers`` installs them."""
