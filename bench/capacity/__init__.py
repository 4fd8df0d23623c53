"""How many machines for how many images a second: a formula, a simulation, and a run that both are held against."""
