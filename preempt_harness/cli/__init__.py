"""The command line `preempt-harness`: one module per subcommand, loaded when it is called."""
