"""The verbs of the console command, one module each with a `main(argv)`."""
