"""N:M sparsity: n weights or blocks of each m consecutive ones."""
