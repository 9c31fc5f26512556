// plan_cli.h: `tandem plan`: how many attention workers to an FFN worker, from a law and a load.
#ifndef TANDEM_ROUTER_PLAN_CLI_H
#define TANDEM_ROUTER_PLAN_CLI_H

// The arguments after `plan`. Prints a table or JSON on standard output. Returns the process's exit
// status: 0, 1 when a file could not be written, 2 after one line on what is wrong with the input.
int plan_main(int argc, char **argv);

#endif
