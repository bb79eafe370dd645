"""What the memory of a training process is used for, by storage and by module.

`memory_profile` puts hooks on a model for chosen steps, `points` are what it takes down. Standard
library only; torch comes from the program.
"""
