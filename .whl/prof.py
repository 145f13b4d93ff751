"""Per-kernel times of the groups of a layer of Llama-3-8B: ours beside the frozen GEMMs."""
import sys, torch
from torch.profiler import profile, ProfilerActivity
from liger_ops.adapters import lora_projections
torch.manual_seed(0)
T=8192
GROUPS={"qkv":(4096,(4096,1024,1024)),"o":(4096,(4096,)),"gate_up":(4096,(14336,14336)),"down":(14336,(4096,))}
def times(run, n=5):
    for _ in range(3): run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(n): run()
        torch.cuda.synchronize()
    out={}
    for e in p.key_averages():
        if e.device_time_total>0: out[e.key]=(e.device_time_total/n, e.count/n)
    return out
def show(title, r=16, adapter=torch.float32, p=0.0, detail=True):
    sums=[0,0]
    for name,(n,ms) in GROUPS.items():
        x=torch.randn(T,n,device="cuda",dtype=torch.bfloat16,requires_grad=True)
        ws=[(torch.randn(m,n,device="cuda")*n**-.5).bfloat16() for m in ms]
        a=[(torch.randn(r,n,device="cuda")*n**-.5).to(adapter).requires_grad_() for m in ms]
        b=[(torch.randn(m,r,device="cuda")*r**-.5).to(adapter).requires_grad_() for m in ms]
        dy=[torch.randn(T,m,device="cuda",dtype=torch.bfloat16) for m in ms]
        k=len(ms)
        def ours():
            ys=lora_projections(x,ws,[None]*k,a,b,[2.]*k,range(k),[p]*k)
            torch.autograd.grad(ys,[x,*a,*b],dy)
        def frozen():
            ys=[torch.nn.functional.linear(x,w) for w in ws]
            torch.autograd.grad(ys,[x],dy)
        o,f=times(ours),times(frozen)
        so,sf=(sum(t for t,_ in d.values()) for d in (o,f))
        sums[0]+=so;sums[1]+=sf
        print(f"{title} {name}: ours {so:.0f} us frozen {sf:.0f} ratio {so/sf:.3f} launches {sum(c for _,c in o.values()):.0f}")
        if detail:
            for key,(t,c) in sorted(o.items(), key=lambda kv:-kv[1][0]): print(f"    {t:8.1f} us {c:4.0f} x {key[:90]}")
    print(f"{title} SUM ours {sums[0]:.0f} frozen {sums[1]:.0f} ratio {sums[0]/sums[1]:.4f}")
for arg in sys.argv[1:] or ["fp32"]:
    if arg=="fp32": show("fp32 r16")
    if arg=="drop": show("fp32 r16 p.05", p=0.05)
    if arg=="bf16": show("bf16 r16", adapter=torch.bfloat16, detail=False)
    if arg=="r64": show("fp32 r64", r=64)
