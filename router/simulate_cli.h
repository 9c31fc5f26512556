// simulate_cli.h: `tandem simulate`: a bundle at several ratios, as discrete events.
#ifndef TANDEM_ROUTER_SIMULATE_CLI_H
#define TANDEM_ROUTER_SIMULATE_CLI_H

// The arguments after `simulate`. Prints a table or JSON on standard output. Returns the process's
// exit status: 0, 1 when a file could not be written, 2 after one line on what is wrong with the
// input.
int simulate_main(int argc, char **argv);

#endif
