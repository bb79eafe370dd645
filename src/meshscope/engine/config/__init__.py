"""Configuration of a training run: values, their file, their problems, their memory."""
