
import sys; sys.path.insert(0,"tools")
import bench_kernels as B, tma_try_prefill as T
from plugins.kernels.triton_prefill import PrefillTiling
B.triton_prefill.prefill_attention = T.prefill_attention
def sw():
    for x in ((128,32,8,4),(128,32,8,6),(128,64,8,3),(128,64,8,4),(128,64,4,3),(128,128,8,2),(128,128,8,3),(256,64,16,3),(256,64,16,4),(256,32,16,5),(64,64,4,3),(64,64,4,4),(64,128,4,3)): yield PrefillTiling(*x)
B.sweep_prefill = sw
sys.argv += ["--only","prefill","--sweep","prefill"]
B.main()
