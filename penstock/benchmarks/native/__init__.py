"""The actor's update beside the same in plain libraries: the measurement, and the programs that use them plainly."""
