"""One benchmark a kernel, each against the limit measured in the same run; `harness` is what they share."""
