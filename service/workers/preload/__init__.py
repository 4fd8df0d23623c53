"""What the process that hosts are forked from imports, beside what every host needs. A broken library stops no host."""
