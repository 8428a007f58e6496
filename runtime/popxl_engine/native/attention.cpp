// Attention, and the products that it is made of.
#include "attention.h"
