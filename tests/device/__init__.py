"""What must hold on an accelerator; `make device` runs it where there is one."""
