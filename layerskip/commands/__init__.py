"""The commands of the command line, which ``layerskip.cli`` puts together."""
