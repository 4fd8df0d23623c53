"""The libraries that people use instead, beside requests on the same weights; ``make test-hard`` installs them."""
