"""Python stacks of a training process: on request of `meshscope hang`, and sampled."""
