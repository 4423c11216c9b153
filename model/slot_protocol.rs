// Explicit-state checker for the core (one level) protocol. BFS => minimal traces.
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
const N: usize = 3; const SM: usize = 3; const KM: usize = 8; const C: usize = 5;
#[derive(Default, Clone, Copy)] struct Id(u64);
impl Hasher for Id { fn finish(&self)->u64{self.0} fn write(&mut self,_:&[u8]){} fn write_u64(&mut self,x:u64){self.0=x} }
#[derive(Default)] struct Fx(u64);
impl Hasher for Fx { fn finish(&self)->u64{ let mut x=self.0; x^=x>>32; x=x.wrapping_mul(0x9E3779B97F4A7C15); x^=x>>29; x=x.wrapping_mul(0xBF58476D1CE4E5B9); x^(x>>32) }
 fn write(&mut self,b:&[u8]){ for c in b.chunks(8){ let mut v=0u64; for (i,x) in c.iter().enumerate(){v|=(*x as u64)<<(8*i);} self.write_u64(v);} }
 fn write_u8(&mut self,x:u8){self.write_u64(x as u64)} fn write_usize(&mut self,_:usize){}
 fn write_u64(&mut self,x:u64){ self.0=(self.0.rotate_left(23)^x).wrapping_mul(0x517cc1b727220a95).wrapping_add(0x2545F4914F6CDD1D); } }
#[derive(Clone,Copy,Default,PartialEq,Eq,Hash,PartialOrd,Ord,Debug)]
struct P { k:u8, w:u8, gen:u8, seq:u8, ack:u8, att:u8, exp:u8, nexp:u8, st:u8, pres:u8, bad:u8, m:u8, cnt:u8, min:u8, rs:u8, ra:u8, inc:u8 }
// k: 0 none 1 DATA 2 PULL 3 ANS 4 DATA past the (unlocked) generation check
#[derive(Clone,Copy,Default,PartialEq,Eq,Hash,Debug)]
struct W { alive:u8, gen:u8, next:u8, queued:u8, pn:[u8;KM], min:u8, del:[u8;KM], att:[u8;KM], exp:[u8;KM], ret:[u8;KM], ge:[u8;KM] }
#[derive(Clone,Copy,Default,PartialEq,Eq,Hash,Debug)]
struct Sl { used:u8, seq:u8, gen:u8, bits:u8, cnt:u8, dirty:u8, done:u8, fm:u8, att:u8, mem:u8, exp:u8, nexp:u8, sg:u8, ep:u8 }
// pol: 0 one policy 1 armed 2 switching at px; pe: epoch (+1) that each chunk began under
#[derive(Clone,Copy,Default,PartialEq,Eq,Hash,Debug)]
struct St { w:[W;N], s:[Sl;SM], ack:[u8;N], gen:u8, exp:u8, cor:u8, wcor:u8, crash:u8, poison:u8, pol:u8, px:u8, pe:[u8;KM], net:[P;C] }
#[derive(Clone,Debug)]
struct Cfg { n:usize, s:usize, k:usize, cap:usize, q:usize, modulus:u8,
 mem_bad:u8, wire_bad:u8, crash:u8 /*1 shrink 2 rejoin*/, poison:u8,
 // rules
 strict_window:bool, ack_on_accept:bool, any_ack:bool,
 redo_any:bool /*any failed check -> redo, aggregator obeys*/, verify:bool /*agg obeys only if its own memory fails*/, freeze:bool, att_strict:bool, linger:bool, retain:bool,
 ret_per_answer:bool, exps:bool, w:usize, ops:&'static [u8] /*lengths of queued operations: handover of exponents across their borders; 2 = UNKNOWN*/, no_moved:bool, exp_gack:bool, exp_late:bool, exp_requant:bool,
 shrink_gen:bool, shrink_clear:bool, shrink_pop:bool, complete_on_add_only:bool, salt_gen:bool,
 slot_gen:bool, toctou:bool, store_if_empty:bool, live:bool, prog_min:bool, nodup:bool, ackfloor:bool, abort_redo_dead:bool,
 flip:u8 /*1 a change of the quorum is asked for once*/, q2:usize, x_ahead:usize /*X = first chunk that begins + this*/, pol_touch:bool /*read at each touch*/ }
fn base()->Cfg{ Cfg{ops:&[],no_moved:false,n:2,s:1,k:3,cap:3,q:9,modulus:100,mem_bad:0,wire_bad:0,crash:0,poison:0,strict_window:true,ack_on_accept:false,any_ack:false,redo_any:false,verify:true,freeze:true,att_strict:true,linger:true,retain:true,ret_per_answer:false,exps:false,w:1,exp_gack:false,exp_late:false,exp_requant:false,shrink_gen:false,shrink_clear:false,shrink_pop:false,complete_on_add_only:false,salt_gen:false,slot_gen:true,toctou:false,store_if_empty:true,live:true,prog_min:false,nodup:false,ackfloor:true,abort_redo_dead:false,flip:0,q2:9,x_ahead:2,pol_touch:false} }
fn quo(c:&Cfg)->bool{ c.q<9 || c.flip>0 && c.q2<9 }
type V=Option<String>;
fn pop(x:u8)->usize{x.count_ones() as usize}
fn wack(c:&Cfg,w:&W)->u8{ let mut a=0; while (a as usize)<c.k && w.del[a as usize]!=0 {a+=1} a }
// Meaning of position k for a rank that decides all operations that begin at or below `begun`: (op, round?, chunk, first chunk's exponents from a round at).
fn layout(c:&Cfg,w:&W,k:usize,begun:usize)->Option<(usize,bool,usize,Option<usize>)>{
 let mut pos=0usize; let mut latest:Option<usize>=None;
 for (op,len) in c.ops.iter().enumerate() {
   let mut round=false;
   if pos<=begun { let known= pos>=c.w && w.del[pos-c.w]!=0 && (w.del[pos-c.w]-1)/16!=2; let moved= !c.no_moved && latest.map_or(false,|r|r+c.w>=pos); round= !known||moved; if round {latest=Some(pos)} }
   let first=pos; let chunk0=pos+round as usize; let end=chunk0+*len as usize;
   if k<end { return Some((op, round&&k==first, k.saturating_sub(chunk0), if round {Some(first)} else {None})) }
   pos=end; }
 None }
impl St{
 fn send(&mut self,c:&Cfg,p:P)->bool{ let u=self.net.iter().filter(|x|x.k!=0).count(); if self.net.contains(&p){return false} if u>=c.cap {return false} for x in self.net.iter_mut(){ if x.k==0{*x=p;break} } self.net.sort_unstable(); true }
 fn rm(&mut self,i:usize){ self.net[i]=P::default(); self.net.sort_unstable(); }
 fn minack(&self,c:&Cfg)->u8{ let mut m=255; for r in 0..c.n { if self.exp>>r&1==1 { m=m.min(self.ack[r]) } } if c.any_ack { let mut x=0; for r in 0..c.n {x=x.max(self.ack[r])} x } else {m} }
 fn try_done(&mut self,c:&Cfg,i:usize){ let x=self.exp; let now=self.pol==2; let s=&mut self.s[i]; if s.used==0||s.done==1 {return}
   let q=if c.pol_touch && now || s.ep==1 {c.q2} else {c.q};
   let ok = if s.fm!=0 { s.bits & s.fm == s.fm } else if q<9 { pop(s.bits)>=q.min(pop(x)) } else if c.shrink_pop { pop(s.bits)>=pop(x) } else { s.bits & x == x };
   if ok && s.bits!=0 { s.done=1; if c.freeze {s.fm=s.bits} } }
 // the aggregator: returns answer, violation
 fn handle(&mut self,c:&Cfg,p:P)->(Option<P>,V){
   let mut a=P{k:3,w:p.w,gen:self.gen,seq:p.seq,..P::default()};
   if p.k!=4 && p.gen!=self.gen { a.st=5; return (Some(a),None) }
   if self.exp>>p.w&1==0 { return (None,None) }
   let r=p.w as usize; let bit=1u8<<r;
   if !c.ack_on_accept { if p.gen==self.gen || !c.slot_gen { self.ack[r]=self.ack[r].max(p.ack); } }
   let mut min=self.minack(c);
   let i=p.seq as usize % c.s; let md=c.modulus; let ws=p.seq%md; 
   let mut v=None;
   if p.k==4 && c.slot_gen && p.gen!=self.gen { return (None,None) }
   // slot of another generation counts as empty
   if c.slot_gen && self.s[i].used==1 && self.s[i].gen!=self.gen { self.s[i]=Sl::default(); }
   let mut st=0u8;
   if p.k==1||p.k==4 {
     if c.ack_on_accept { /* ack recorded only if contribution accepted */ 
       let mut t=*self; t.ack[r]=t.ack[r].max(p.ack); let _=t; }
     let s=self.s[i]; let sw=s.seq%md;
     let diff=(ws+md-sw)%md; // serial
     let same=s.used==1 && sw==ws;
     let fresh; 
     if c.strict_window {
        let d=(ws+md-(min%md))%md; 
        if d as usize>=c.s { st= if p.seq<min {3} else {2}; fresh=false; }
        else { fresh = !same; }
     } else { fresh = !same && (s.used==0 || (diff<md/2+(md%2) && min>s.seq)); if !same && !fresh { st= if diff>=md/2 {3} else {2} } }
     let older = st==3; let _=older;
     if st==0 && fresh && c.flip>0 {
        let k=p.seq as usize;
        if self.pol==1 { self.pol=2; self.px=p.seq+c.x_ahead as u8 }
        let e=(self.pol==2 && p.seq>=self.px) as u8;
        if self.pe[k]!=0 && self.pe[k]!=e+1 { v=Some(format!("seq {} began under two policies",k)) }
        self.pe[k]=e+1;
        for j in 0..KM { if self.pe[j]!=0 && ((j<k && self.pe[j]>e+1) || (j>k && self.pe[j]<e+1)) { v=Some(format!("no one chunk parts the policies: seq {} has epoch {}, seq {} epoch {}",j,self.pe[j]-1,k,e)) } }
     }
     let ep=if c.flip>0 && st==0 && fresh {self.pe[p.seq as usize]-1} else {0};
     if st==0 && fresh {
        let n=&mut self.s[i];
        if p.bad==1 { // corrupted on the wire: stored, found, undone
           *n=Sl{used:1,seq:p.seq,gen:self.gen,bits:0,dirty:1,att:0,ep,..Sl::default()}; st=7;
        } else {
        *n=Sl{used:1,seq:p.seq,gen:self.gen,bits:bit,cnt:1<<(2*r),att:p.att,exp:p.exp,nexp:p.nexp,sg:p.gen,ep,..Sl::default()};
        if p.gen!=self.gen { n.dirty=1 } }
        self.try_done(c,i);
     } else if st==0 && same {
        let a_ok = !c.verify || s.mem==1;
        if p.att>s.att && a_ok && (!c.att_strict || p.att==s.att+1 || true) {
           if c.abort_redo_dead && s.fm & !self.exp !=0 { st=6 } else {
           let n=&mut self.s[i]; n.bits=0; n.cnt=0; n.done=0; n.mem=0; n.att=p.att; n.nexp=0; n.dirty=0; if !c.freeze {n.fm=0} else {} }
        }
        let s=self.s[i];
        let n=&mut self.s[i];
        if st==6 {}
        else if c.att_strict && p.att<s.att { st=1 }
        else if s.bits&bit!=0 && !c.nodup { if c.exp_late {n.nexp=n.nexp.max(p.nexp)} }
        else if s.done==1 || (s.fm!=0 && s.fm&bit==0) { st=4; if c.exp_late {n.nexp=n.nexp.max(p.nexp)} }
        else if p.bad==1 { st=7 }
        else {
          if s.bits==0 && c.store_if_empty { n.dirty=0; n.cnt=0; n.exp=p.exp; n.sg=p.gen; n.nexp=0 }
          else if n.exp!=p.exp { v=Some(format!("mixed exponents in slot of seq {}: {} and {}",p.seq,n.exp,p.exp)); }
          if p.gen!=s.gen {n.dirty=1}
          if n.seq!=p.seq {n.dirty=1}
          n.bits|=bit; n.cnt+=1<<(2*r); n.nexp=n.nexp.max(p.nexp); if n.sg!=p.gen {n.sg=9}
        }
        if !c.complete_on_add_only || self.s[i].bits!=s.bits { self.try_done(c,i); }
     }
     if c.ack_on_accept && st==0 { self.ack[r]=self.ack[r].max(p.ack); min=self.minack(c); }
     a.inc=(self.s[i].used==1&&self.s[i].seq==p.seq&&self.s[i].bits&bit!=0) as u8;
   } else if p.k==2 {
     if c.ack_on_accept && c.linger { self.ack[r]=self.ack[r].max(p.ack); min=self.minack(c);}
     if !c.complete_on_add_only { self.try_done(c,i); }
   }
   let s=self.s[i];
   a.st=st; a.min=min; if c.prog_min { a.min=(0..c.n).filter(|x|self.exp>>x&1==1).map(|x|self.w[x].next).min().unwrap(); }
   if s.used==1 && s.seq%md==ws { a.att=s.att; a.nexp=s.nexp; a.exp=s.exp;
     if s.done==1 { a.pres=1; a.m=s.bits; a.cnt=s.cnt; a.bad=s.mem; if c.salt_gen && s.sg!=self.gen {a.bad=1} if s.dirty==1 { a.bad=2 } if s.seq!=p.seq {a.bad=2} } }
   if c.linger { for j in 0..c.s { let x=self.s[j]; if x.used==1&&x.gen==self.gen&&x.att>0&&x.done==0 { a.rs=x.seq+1; a.ra=x.att; } } }
   if p.k==4 { a.gen=p.gen }
   (Some(a),v)
 }
 fn recv(&mut self,c:&Cfg,p:P,corrupt:bool)->V{
   let r=p.w as usize; let n=c.n;
   if self.w[r].alive==0 {return None}
   if p.gen!=self.w[r].gen { 
     if p.st==5 && p.gen>self.w[r].gen { 
        if c.crash==2 { let al=self.w[r]; self.w[r]=W{alive:al.alive,gen:p.gen,..W::default()}; }
        else { self.w[r].gen=p.gen; if c.shrink_clear { for k in 0..c.k { if self.w[r].del[k]==0 { self.w[r].att[k]=0 } } } }
     }
     return None }
   let k=p.seq as usize; let me=1u8<<r;
   self.w[r].min=self.w[r].min.max(p.min);
   if c.ret_per_answer && p.st==4 && !corrupt { self.w[r].ret[k]+=1; if self.w[r].ret[k]>1 { return Some(format!("rank {} adds its late contribution of seq {} to its next gradient twice",r,k)) } }
   if p.rs!=0 { let q=p.rs as usize-1; if self.w[r].att[q]<p.ra {self.w[r].att[q]=p.ra} }
   if self.w[r].del[k]!=0 {return None}
   if c.exp_gack && p.inc==1 { let w=&mut self.w[r]; if w.ge[k]<p.nexp+1 {w.ge[k]=p.nexp+1} }
   if p.pres==1 {
     if p.bad==1||corrupt { // check fails
        if c.redo_any || (c.verify && p.bad==1) || (c.salt_gen&&p.bad==1) { if self.w[r].att[k]<=p.att && p.att<3 { self.w[r].att[k]=p.att+1 } }
        return None }
     if p.bad==2 { return Some(format!("rank {} given a wrong sum for seq {} (foreign or stale content added)",r,k)) }
     for x in 0..n { let want= p.m>>x&1; if p.cnt>>(2*x)&3 != want { return Some(format!("sum of seq {} not what its bitmap says (cnt {:b} bits {:b})",k,p.cnt,p.m)) } }
     let d=1+p.m+16*p.nexp;
     for x in 0..n { if x!=r && self.w[x].gen==self.w[r].gen || (c.crash!=2 && x!=r) { let o=self.w[x].del[k]; if o!=0 && o!=d && (self.w[x].alive==1) { return Some(format!("ranks {} and {} deliver different results of seq {}: bitmap {:b}/{:b} nexp {}/{}",x,r,k,(o-1)&15,p.m,(o-1)/16,p.nexp)) } } }
     let q_of=if c.flip>0 && self.pe[k]==2 {c.q2} else {c.q};
     if c.flip>0 && q_of==9 && pop(p.m)<c.n { return Some(format!("seq {} began when all ranks were needed, and is complete with {:b}",k,p.m)) }
     if q_of==9 && p.m&me==0 { return Some(format!("rank {} seq {}: result without its contribution although quorum is n (contribution lost)",r,k)) }
     self.w[r].del[k]=d;
     // residual: decided by the delivered bitmap
     if quo(c) && !c.ret_per_answer { if p.m&me==0 { self.w[r].ret[k]+=1 } }
     if quo(c) && p.m&me!=0 && self.w[r].ret[k]>0 { return Some(format!("rank {} seq {}: included AND returned",r,k)) }
     // a contribution in nobody's bitmap may not have been dropped
   } else if p.att>self.w[r].att[k] { self.w[r].att[k]=p.att }
   None
 }
 // payload corrupted in flight towards aggregator is modelled by p.bad=1 copies
 fn contrib(&mut self,c:&Cfg,r:usize,k:usize)->Option<P>{
   let w=self.w[r]; let mut p=P{k:1,w:r as u8,gen:w.gen,seq:k as u8,ack:wack(c,&w),att:w.att[k],..P::default()};
   if !c.ops.is_empty() {
     if w.exp[k]!=0 { p.exp=w.exp[k]-1; p.nexp=w.pn[k]; return Some(p) }
     let delivered=wack(c,&w) as usize; if k>=delivered+c.w && !c.exp_gack { return None }
     if c.exp_gack && k>=c.w && w.del[k-c.w]==0 && w.ge[k-c.w]==0 { return None }
     let mut v=w; if c.exp_gack { for x in 0..c.k { if v.del[x]==0 && v.ge[x]!=0 { v.del[x]=1+16*(v.ge[x]-1) } } }
     let (op,round,j,at)=layout(c,&v,k,k)?; if op>=w.queued as usize { return None }
     let need=|o:usize,j:usize|((o+j+1)%2) as u8;
     if round { p.exp=100+op as u8; p.nexp=(0..c.w.min(c.ops[op] as usize)).map(|j|need(op,j)).max().unwrap() }
     else { let e= match at { Some(f) if j<c.w => { if v.del[f]==0 {return None} (v.del[f]-1)/16 } _ if j<c.w => (v.del[k-j-c.w]-1)/16, _ => (v.del[k-c.w]-1)/16 };
       p.exp=if e<need(op,j) {200+r as u8} else {e+4*(op as u8*4+j as u8)};
       p.nexp= match layout(c,&v,k+c.w,k) { Some((o,false,j,_)) if o==op => need(o,j), Some((o,false,0,_)) if o<w.queued as usize => (0..c.w.min(c.ops[o] as usize)).map(|j|need(o,j)).max().unwrap(), _=>2 }; }
     self.w[r].exp[k]=p.exp+1; self.w[r].pn[k]=p.nexp; return Some(p) }
   if c.exps { 
     let e= if k<c.w {0} else if w.del[k-c.w]!=0 { (w.del[k-c.w]-1)/16 } else if c.exp_gack && w.ge[k-c.w]!=0 { w.ge[k-c.w]-1 } else { return None };
     let e= if c.exp_requant || w.exp[k]==0 { e } else { w.exp[k]-1 };
     self.w[r].exp[k]=e+1; p.exp=e; p.nexp= (r%2) as u8 ; }
   Some(p) }
 fn goal(&self,c:&Cfg)->bool{ if c.abort_redo_dead && (0..c.s).any(|i|{let x=self.s[i]; x.used==1 && x.fm & !self.exp !=0 && (x.mem==1||x.done==0)}) {return true}
   (0..c.n).all(|r| self.w[r].alive==0 || self.exp>>r&1==0 || (self.w[r].gen==self.gen && (0..c.k).all(|k|self.w[r].del[k]!=0))) }
 fn succ(&self,c:&Cfg,out:&mut Vec<(String,St,V)>){
   for i in 0..C { let p=self.net[i]; if p.k==0 {continue}
     { let mut t=*self; t.rm(i); out.push((String::new()+"drop",t,None)); }
     if c.toctou && p.k==1 && p.gen==self.gen { let mut t=*self; t.rm(i); let mut q=p; q.k=4; if t.send(c,q) { out.push((format!("cpu: gen check passed {}",show(p)),t,None)); } }
     for keep in [false,true] {
       let mut t=*self; if !keep {t.rm(i)} else if p.k==4 {continue}
       if p.k==3 { let v=t.recv(c,p,false); if keep && v.is_none() && t==*self {continue} out.push((format!("deliver{} {}",if keep{"(dup stays)"}else{""},show(p)),t,v));
         if p.pres==1 && c.wire_bad>self.wcor && p.bad==0 { let mut t=*self; if !keep {t.rm(i)} t.wcor+=1; let v=t.recv(c,p,true); out.push((format!("deliver CORRUPTED {}",show(p)),t,v)); } }
       else { let (a,v)=t.handle(c,p); let mut note="";
         if let Some(a)=a { if !t.send(c,a) {note=" [answer lost]"} }
         if keep && v.is_none() && t==*self {continue}
         out.push((format!("agg {}{} -> {}{}",if keep{"(dup stays) "}else{""},show(p),a.map(show).unwrap_or_default(),note),t,v)); }
     } }
   for r in 0..c.n { let w=self.w[r]; if w.alive==0 {continue}
     if !c.ops.is_empty() && (w.queued as usize)<c.ops.len() { let mut t=*self; t.w[r].queued+=1; out.push((format!("w{} queues operation {}",r,w.queued),t,None)); }
     let ack=wack(c,&w);
     let mut ks:Vec<usize>=vec![];
     let nx=w.next as usize;
     if nx<c.k && nx < ack as usize + c.s { ks.push(nx) }
     for k in 0..nx { if w.del[k]==0 { ks.push(k) } else if (w.att[k]>0 || (c.shrink_clear && c.att_strict==false && w.gen>0)) && k>=w.min as usize && c.retain && c.linger { ks.push(k) } }
     for k in ks { let mut t=*self; 
        if k==nx && w.del[k]!=0 && quo(c) { t.w[r].next+=1; out.push((format!("w{} skips seq {} (already delivered)",r,k),t,None)); continue }
        if let Some(p)=t.contrib(c,r,k) { if k==nx {t.w[r].next+=1} if t.send(c,p) { 
           out.push((format!("w{} sends {}",r,show(p)),t,None)); 
           if c.poison>self.poison { let mut t2=t; for x in t2.net.iter_mut(){ if *x==p {x.bad=1} } t2.net.sort_unstable(); t2.poison+=1; out.push((format!("w{} sends {} CORRUPTED",r,show(p)),t2,None)); }
        } } }
     // pulls
     let hi = if quo(c) || c.crash==1 { (ack as usize+c.s).min(c.k) } else { nx };
     for k in 0..hi { if w.del[k]==0 { let mut t=*self; if t.send(c,P{k:2,w:r as u8,gen:w.gen,seq:k as u8,ack,att:0,..P::default()}) { out.push((format!("w{} pulls {} ack {}",r,k,ack),t,None)); } } }
     if c.linger && ((w.min as usize)<c.k||c.crash==2) && ack as usize>0 { let mut t=*self; if t.send(c,P{k:2,w:r as u8,gen:w.gen,seq:ack-1,ack,att:0,..P::default()}) { out.push((format!("w{} lingers: pull ack {}",r,ack),t,None)); } }
   }
   if c.flip>0 && self.pol==0 { let mut t=*self; t.pol=1; out.push(("control: ANOTHER QUORUM is wanted".into(),t,None)); }
   if c.mem_bad>self.cor { for i in 0..c.s { let s=self.s[i]; if s.used==1&&s.done==1&&s.mem==0 && s.gen==self.gen { let mut t=*self; t.s[i].mem=1; t.cor+=1; out.push((format!("MEMORY of slot {} (seq {}) corrupted",i,s.seq),t,None)); } } }
   if c.crash>0 && self.crash==0 { let r=c.n-1; let mut t=*self; t.crash=1; t.w[r].alive=0; out.push((format!("rank {} CRASHES",r),t,None)); }
   if c.crash>0 && self.crash==1 { let r=c.n-1; let mut t=*self; t.crash=2;
      if c.crash==1 { t.exp&=!(1<<r); if c.shrink_gen {t.gen+=1} if c.shrink_clear { t.s=Default::default(); } out.push((format!("control: SHRINK without rank {}",r),t,None)); }
      else { t.gen+=1; t.ack=[0;N]; if c.shrink_clear {t.s=Default::default();} t.w[r]=W{alive:1,gen:t.gen,..W::default()}; out.push((format!("control: rank {} REJOINS, generation {}",r,t.gen),t,None)); } }
 }
}
fn show(p:P)->String{ match p.k {1|4=>format!("DATA(w{} g{} seq{} ack{} att{} e{} ne{}{})",p.w,p.gen,p.seq,p.ack,p.att,p.exp,p.nexp,if p.bad==1{" bad"}else{""}),2=>format!("PULL(w{} g{} {} ack{})",p.w,p.gen,p.seq,p.ack),
 3=>{let s=["OK","NOT_YET","BUSY","STALE","NOT_INCL","REJOIN","ABORT","BADSUM"][p.st as usize]; format!("ANS(w{} g{} seq{} {} att{}{}{})",p.w,p.gen,p.seq,s,p.att,if p.pres==1{format!(" RESULT bits{:03b}{} ne{}",p.m,if p.bad!=0{" (bad)"}else{""},p.nexp)}else{String::new()},if p.rs>0{format!(" redo{}@{}",p.rs-1,p.ra)}else{String::new()})} _=>String::new()} }
fn fp(s:&St)->u64{ let mut h=Fx(0x1234567); s.hash(&mut h); h.finish() }
fn run(name:&str,c:&Cfg,limit:usize)->bool{
 let t0=std::time::Instant::now();
 let mut s0=St::default(); s0.exp=(1<<c.n)-1; for r in 0..c.n {s0.w[r].alive=1} if c.mem_bad==0 && c.wire_bad==0 && !c.ops.is_empty() && c.k>=6 { for r in 0..c.n-1 { s0.w[r].queued=c.ops.len() as u8 } s0.w[c.n-1].queued=1 }
 let mut states=vec![s0]; let mut par:Vec<u32>=vec![0]; let mut seen:HashMap<u64,u32,BuildHasherDefault<Id>>=HashMap::default(); seen.insert(fp(&s0),0);
 let mut edges:Vec<(u32,u32)>=vec![]; let mut goals=vec![]; let mut i=0; let mut out=vec![]; let mut trunc=false;
 let trace=|states:&Vec<St>,par:&Vec<u32>,mut i:usize,last:Option<String>|{ let mut path=vec![i]; while i!=0 { i=par[i] as usize; path.push(i) } path.reverse(); let mut l=vec![]; 
   for w in path.windows(2) { let mut o=vec![]; states[w[0]].succ(c,&mut o); let t=o.iter().find(|x|x.1==states[w[1]]).map(|x|x.0.clone()).unwrap_or("?".into()); l.push(t) } 
   if let Some(x)=last {l.push(x)} for (n,x) in l.iter().enumerate(){ println!("   {:2} {}",n+1,x) } };
 while i<states.len() { let s=states[i]; if s.goal(c) && !(c.crash>0&&s.crash==1) {goals.push(i as u32)}
   out.clear(); s.succ(c,&mut out);
   for (l,t,v) in out.drain(..) { 
     if let Some(v)=v { println!("[FLAW] {name}: {v}   ({} states, {:?})",states.len(),t0.elapsed()); trace(&states,&par,i,Some(l)); return false }
     let h=fp(&t); let id=*seen.entry(h).or_insert_with(||{ states.push(t); par.push(i as u32); (states.len()-1) as u32 }); if c.live {edges.push((i as u32,id))} }
   i+=1; if states.len()>limit {trunc=true; break} }
 if !trunc && c.live { // AG EF goal
   let n=states.len(); let mut deg=vec![0u32;n+1]; for e in &edges {deg[e.1 as usize+1]+=1} for j in 0..n {deg[j+1]+=deg[j]} let mut pos=deg.clone(); let mut adj=vec![0u32;edges.len()]; for e in &edges { adj[pos[e.1 as usize] as usize]=e.0; pos[e.1 as usize]+=1 }
   let mut ok=vec![false;n]; let mut st=goals.clone(); for g in &goals {ok[*g as usize]=true}
   while let Some(x)=st.pop() { for j in deg[x as usize]..deg[x as usize+1] { let y=adj[j as usize]; if !ok[y as usize] {ok[y as usize]=true; st.push(y)} } }
   if let Some(b)=(0..n).find(|j|!ok[*j]) { println!("[FLAW] {name}: no way to completion from here (deadlock/livelock)  ({} states, {:?})",n,t0.elapsed()); trace(&states,&par,b,None); let s=states[b]; println!("      slots {:?}",&s.s[..c.s].iter().map(|x|format!("seq{} bits{:03b} done{} att{} mem{}",x.seq,x.bits,x.done,x.att,x.mem)).collect::<Vec<_>>()); return false } }
 println!("[ok]   {name}: {} states{} {:?}",states.len(),if trunc{" (TRUNCATED, no liveness)"}else{", safe, goal reachable from all"},t0.elapsed()); !trunc }
fn main(){
 let pat=std::env::args().nth(1).unwrap_or_default(); let lim=std::env::args().nth(2).and_then(|x|x.parse().ok()).unwrap_or(12_000_000usize);
 let mut l:Vec<(&str,Cfg)>=vec![];
 let b=base();
 l.push(("base n2 S1 K3",b.clone()));
 l.push(("base n2 S2 K3",Cfg{s:2,k:3,..b.clone()}));
 l.push(("base n2 S2 K4 cap2",Cfg{s:2,k:4,cap:2,..b.clone()}));
 l.push(("base n3 S1 K3 cap2",Cfg{n:3,k:3,cap:2,..b.clone()}));
 l.push(("base n3 S2 K3 cap2",Cfg{n:3,s:2,k:3,cap:2,..b.clone()}));
 l.push(("a-serial slot-seq rule (no window), mod100",Cfg{s:1,k:3,strict_window:false,..b.clone()}));
 l.push(("a-serial half-wrap mod6",Cfg{s:1,k:6,modulus:6,strict_window:false,cap:2,..b.clone()}));
 l.push(("a-window half-wrap mod6",Cfg{s:1,k:6,modulus:6,cap:2,..b.clone()}));
 l.push(("b-ack only from accepted DATA",Cfg{ack_on_accept:true,..b.clone()}));
 l.push(("b-reuse on any ack",Cfg{any_ack:true,s:1,..b.clone()}));
 // c redo
 l.push(("c-redo as written (no linger/retain), wire",Cfg{k:2,wire_bad:1,redo_any:true,verify:false,freeze:false,linger:false,retain:false,..b.clone()}));
 l.push(("c-redo linger no retain",Cfg{k:2,wire_bad:1,redo_any:true,verify:false,freeze:false,linger:true,retain:false,..b.clone()}));
 l.push(("c-redo linger+retain n2",Cfg{k:2,wire_bad:1,redo_any:true,verify:false,freeze:false,..b.clone()}));
 l.push(("c-redo quorum no freeze",Cfg{n:3,q:2,k:1,cap:3,wire_bad:1,redo_any:true,verify:false,freeze:false,..b.clone()}));
 l.push(("c-redo quorum freeze",Cfg{n:3,q:2,k:1,cap:3,wire_bad:1,redo_any:true,verify:false,freeze:true,..b.clone()}));
 l.push(("c-redo verify wire",Cfg{k:2,wire_bad:1,..b.clone()}));
 l.push(("c-redo verify mem",Cfg{k:2,mem_bad:1,..b.clone()}));
 l.push(("c-redo verify mem+wire quorum freeze n3",Cfg{n:3,q:2,k:1,cap:3,wire_bad:1,mem_bad:1,..b.clone()}));
 l.push(("c-redo verify mem k2 n3 cap2",Cfg{n:3,k:2,cap:2,mem_bad:1,..b.clone()}));
 l.push(("c-redo verify mem, no linger",Cfg{k:2,mem_bad:1,linger:false,..b.clone()}));
 l.push(("c-attempt not strict (old attempts accepted) quorum",Cfg{n:3,q:2,k:1,cap:3,mem_bad:1,att_strict:false,..b.clone()}));
 // d exponents
 l.push(("d-exp from result",Cfg{exps:true,w:1,k:3,..b.clone()}));
 l.push(("d-exp from GACK",Cfg{exps:true,w:1,k:3,s:2,exp_gack:true,..b.clone()}));
 l.push(("d-exp late updates, quorum",Cfg{exps:true,w:1,n:3,q:2,k:2,cap:3,exp_late:true,..b.clone()}));
 l.push(("d-exp frozen, quorum",Cfg{exps:true,w:1,n:3,q:2,k:2,cap:2,..b.clone()}));
 // e quorum
 l.push(("e-quorum return per answer",Cfg{n:3,q:2,k:1,cap:3,ret_per_answer:true,..b.clone()}));
 l.push(("e-quorum return per answer n2",Cfg{n:2,q:1,k:1,cap:3,ret_per_answer:true,..b.clone()}));
 l.push(("e-quorum by bitmap n2",Cfg{n:2,q:1,k:3,cap:3,..b.clone()}));
 l.push(("e-quorum by bitmap n3 k2",Cfg{n:3,q:2,k:2,cap:2,..b.clone()}));
 // g shrink
 l.push(("g-shrink: new generation, slots cleared",Cfg{n:3,k:2,cap:2,crash:1,shrink_gen:true,shrink_clear:true,slot_gen:true,..b.clone()}));
 l.push(("g-shrink: new gen clears, n2->1",Cfg{n:3,k:1,cap:3,crash:1,shrink_gen:true,shrink_clear:true,..b.clone()}));
 l.push(("g-shrink: popcount completion",Cfg{n:3,k:1,cap:2,crash:1,shrink_pop:true,..b.clone()}));
 l.push(("g-shrink: complete on add only",Cfg{n:3,k:1,cap:2,crash:1,complete_on_add_only:true,..b.clone()}));
 l.push(("g-shrink: gen bump, slots kept, salt by gen",Cfg{n:3,k:1,cap:2,crash:1,shrink_gen:true,slot_gen:false,salt_gen:true,verify:false,redo_any:true,..b.clone()}));
 l.push(("g-shrink: FIX same gen, slots kept k2",Cfg{n:3,k:2,cap:2,crash:1,..b.clone()}));
 l.push(("g-shrink: FIX same gen, slots kept k1 cap3",Cfg{n:3,k:1,cap:3,crash:1,..b.clone()}));
 l.push(("g-shrink: FIX + mem corruption",Cfg{n:3,k:1,cap:2,crash:1,mem_bad:1,..b.clone()}));
 l.push(("g-shrink: cleared, delivered ranks contribute again",Cfg{n:3,k:1,cap:2,crash:1,shrink_gen:true,shrink_clear:true,att_strict:false,..b.clone()}));
 l.push(("b2-ack only accepted DATA, no linger",Cfg{ack_on_accept:true,linger:false,..b.clone()}));
 l.push(("b2-base no linger",Cfg{linger:false,..b.clone()}));
 // rejoin
 l.push(("g-rejoin: slots without generation",Cfg{n:2,k:2,cap:3,crash:2,slot_gen:false,..b.clone()}));
 l.push(("g-rejoin: slot.gen",Cfg{n:2,k:2,cap:3,crash:2,..b.clone()}));
 l.push(("i-rejoin toctou: gen checked before lock",Cfg{n:2,k:2,cap:3,crash:2,toctou:true,slot_gen:false,..b.clone()}));
 l.push(("i-rejoin toctou: gen checked again under lock",Cfg{n:2,k:2,cap:3,crash:2,toctou:true,..b.clone()}));
 // store undone
 l.push(("x-bad first store then add",Cfg{k:2,poison:1,store_if_empty:false,..b.clone()}));
 l.push(("x-bad first store, store if empty",Cfg{k:2,poison:1,..b.clone()}));
 l.push(("z-quorum n3 q2 k1 cap2 redo verify mem+wire",Cfg{n:3,q:2,k:1,cap:2,wire_bad:1,mem_bad:1,..b.clone()}));
 l.push(("z-quorum n3 q2 k2 cap2 redo mem",Cfg{n:3,q:2,k:2,cap:2,mem_bad:1,..b.clone()}));
 l.push(("z-quorum n3 q2 k1 cap2 redo by anybody, freeze",Cfg{n:3,q:2,k:1,cap:2,wire_bad:1,redo_any:true,verify:false,..b.clone()}));
 l.push(("z-quorum n2 q1 s2 k3 cap2",Cfg{n:2,q:1,s:2,k:3,cap:2,..b.clone()}));
 l.push(("z-not strict attempts quorum freeze cap2",Cfg{n:3,q:2,k:1,cap:2,mem_bad:1,att_strict:false,..b.clone()}));
 l.push(("z-shrink + mem, abort when the dead rank is in a redo, cap2 k2",Cfg{n:3,k:2,cap:2,crash:1,mem_bad:1,abort_redo_dead:true,..b.clone()}));
 l.push(("z-all: n3 q2 k2 cap2 exps shrink",Cfg{n:3,q:2,k:2,cap:2,exps:true,crash:1,abort_redo_dead:true,..b.clone()}));
 l.push(("z-all: n3 q2 k1 cap2 shrink mem",Cfg{n:3,q:2,k:1,cap:2,crash:1,mem_bad:1,wire_bad:1,abort_redo_dead:true,..b.clone()}));
 l.push(("z-exps redo n2 k2",Cfg{exps:true,k:2,mem_bad:1,..b.clone()}));
 l.push(("z-rejoin n3 k1 cap2 toctou",Cfg{n:3,k:1,cap:2,crash:2,toctou:true,..b.clone()}));
 l.push(("y-big n2 S3 K4 cap2",Cfg{s:3,k:4,cap:2,..b.clone()}));
 l.push(("y-big n2 S2 K5 cap2 poison mem",Cfg{s:2,k:3,cap:2,poison:1,mem_bad:1,..b.clone()}));
 l.push(("y-big n3 S2 K3 cap2",Cfg{n:3,s:2,k:3,cap:2,..b.clone()}));
 l.push(("m-mutation: no duplicate test",Cfg{nodup:true,..b.clone()}));
 l.push(("m-retention and linger by p_min=lowest progress",Cfg{k:2,mem_bad:1,prog_min:true,..b.clone()}));
 l.push(("t-rejoin: slots cleared at the bump, generation checked only before the lock",Cfg{n:2,k:2,cap:3,crash:2,toctou:true,slot_gen:false,shrink_clear:true,..b.clone()}));
 l.push(("t-rejoin: slots cleared at the bump, no race",Cfg{n:2,k:2,cap:2,crash:2,toctou:false,slot_gen:false,shrink_clear:true,..b.clone()}));

 l.push(("o-handover n2 w1 ops 2,2",Cfg{ops:&[2,2],w:1,s:2,k:4,cap:2,..b.clone()}));
 l.push(("o-handover n2 w2 ops 2,1,1 cap1",Cfg{ops:&[2,1,1],w:2,s:2,k:5,cap:1,..b.clone()}));
 l.push(("o-handover n2 w2 ops 2,1,1,1 S3 cap1",Cfg{ops:&[2,1,1,1],w:2,s:3,k:6,cap:1,..b.clone()}));
 l.push(("o-handover n2 w2 redo mem cap1",Cfg{ops:&[2,1],w:2,s:2,k:4,cap:1,mem_bad:1,..b.clone()}));
 l.push(("o-handover n3 w1 ops 1,1,1",Cfg{n:3,ops:&[1,1,1],w:1,s:2,k:4,cap:2,..b.clone()}));
 l.push(("o-handover wire damage w1",Cfg{ops:&[1,2],w:1,s:2,k:4,cap:2,wire_bad:1,poison:1,..b.clone()}));
 l.push(("p-handover w3 without the rule about moved positions",Cfg{ops:&[3,1,2],w:3,s:3,k:7,cap:1,no_moved:true,live:false,..b.clone()}));
 l.push(("o-handover w3 ops 3,1,2 cap1",Cfg{ops:&[3,1,2],w:3,s:3,k:7,cap:1,..b.clone()}));
 l.push(("p-handover w2 without the rule, round at d",Cfg{ops:&[2,1,1,1],w:2,s:3,k:6,cap:1,no_moved:true,..b.clone()}));
 l.push(("p-handover w1 from acknowledgements",Cfg{ops:&[2,2],w:1,s:2,k:4,cap:3,exp_gack:true,..b.clone()}));
 // q policy flips: X = first chunk to begin + 2 S
 l.push(("q-flip n2 S1 K4 all to 1 cap2",Cfg{flip:1,q:9,q2:1,x_ahead:2,s:1,k:4,cap:2,..b.clone()}));
 l.push(("q-flip n2 S1 K4 1 to all cap2",Cfg{flip:1,q:1,q2:9,x_ahead:2,s:1,k:4,cap:2,..b.clone()}));
 l.push(("q-flip n2 S2 K5 all to 1 X = k + S cap2",Cfg{flip:1,q:9,q2:1,x_ahead:2,s:2,k:5,cap:2,..b.clone()}));
 l.push(("q-flip n2 S2 K4 1 to all X = k + S cap2",Cfg{flip:1,q:1,q2:9,x_ahead:2,s:2,k:4,cap:2,..b.clone()}));
 l.push(("q-flip n2 S1 K3 redo mem all to 1 cap2",Cfg{flip:1,q:9,q2:1,x_ahead:1,s:1,k:3,cap:2,mem_bad:1,..b.clone()}));
 l.push(("q-flip n3 S1 K2 all to 2 cap2",Cfg{n:3,flip:1,q:9,q2:2,x_ahead:1,s:1,k:2,cap:2,..b.clone()}));
 l.push(("r-flip X = k + 1",Cfg{flip:1,q:9,q2:1,x_ahead:1,s:2,k:4,cap:2,live:false,..b.clone()}));
 l.push(("r-flip the policy is read at each touch",Cfg{flip:1,q:9,q2:1,x_ahead:1,pol_touch:true,s:1,k:3,cap:2,live:false,..b.clone()}));
 for (n,c) in l { if n.contains(&pat) { run(n,&c,lim); } }
}
