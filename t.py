import time,os
os.environ.pop('TRITON_INTERPRET',None)
t=time.time()
from tritoncp.offline import *
from tritoncp.inspect import shipped
print('import',time.time()-t)
from collections import Counter
jobs=shipped()
t=time.time()
for j in jobs[:30]: launch_of(j)
print(len(jobs),(time.time()-t)/30)
t=time.time()
for j in jobs[:60]: launch_of(j)
print((time.time()-t)/60)
